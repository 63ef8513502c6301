# The table of contents, which __init__.py loads lazily.
from .jobs import Job as Job
from .jobs import layouts_of as layouts_of
from .jobs import refusal as refusal
from .machines import Hardware as Hardware
from .machines import hardware as hardware
from .memory import Memory as Memory
from .memory import memory_of as memory_of
from .plans import Plan as Plan
from .plans import Seconds as Seconds
from .plans import plan as plan
from .plans import seconds_of as seconds_of
from .table import plan_table as plan_table
from .traffic import Transfer as Transfer
from .traffic import traffic_of as traffic_of
