# The table of contents, which __init__.py loads lazily.
from .balancing import balanced as balanced
from .bins import pack_bins as pack_bins
from .bins import take_rows as take_rows
from .fits import VersionedFit as VersionedFit
from .fits import best_fit as best_fit
from .fits import first_fit as first_fit
from .fits import sequential as sequential
from .fits import with_version as with_version
from .report import bins_hash as bins_hash
from .report import overlong_warning as overlong_warning
from .report import packing_report as packing_report
from .report import row_costs as row_costs
