"""Numbers that no float64 holds: beyond 48 bits, of terms far apart, and where it is missing."""

from mcftensor.wide.beyond_float64 import SPACED as SPACED
from mcftensor.wide.beyond_float64 import by_algorithm as by_algorithm
from mcftensor.wide.beyond_float64 import in_float32_terms as in_float32_terms
from mcftensor.wide.composed_functions import COMPOSED as COMPOSED
from mcftensor.wide.corrections import correction_of as correction_of
from mcftensor.wide.corrections import from_all_terms as from_all_terms
from mcftensor.wide.corrections import in_longer_format as in_longer_format
from mcftensor.wide.exact_derivatives import OWN as OWN
from mcftensor.wide.functions import FUNCTIONS as FUNCTIONS
