# The table of contents, which __init__.py loads lazily.
from .directory import make_run_dir as make_run_dir
from .errors import SAVED as SAVED
from .errors import error_code as error_code
from .errors import leave as leave
from .errors import report_errors as report_errors
from .garbage import collected_by_hand as collected_by_hand
from .limits import Limits as Limits
from .lock import run_lock as run_lock
from .reproducible import deterministic as deterministic
from .run import Loop as Loop
from .run import Run as Run
from .run import open_run as open_run
from .signals import stop_votes as stop_votes
from .signals import trap_signals as trap_signals
from .startup import agree_at_start as agree_at_start
from .startup import code_facts as code_facts
from .watchdog import watch as watch
