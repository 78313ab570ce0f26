"""Formats: each owns how its numbers are stored, and what they are computed with."""

from mcftensor.arithmetic.terms import Network as Network
from mcftensor.arithmetic.wide import Machine as Machine
from mcftensor.formats.finfo import FInfo as FInfo
from mcftensor.formats.finfo import finfo as finfo
from mcftensor.formats.format import FORMATS as FORMATS
from mcftensor.formats.format import MAX_TERMS as MAX_TERMS
from mcftensor.formats.format import PLAIN as PLAIN
from mcftensor.formats.format import Component as Component
from mcftensor.formats.format import ExpansionFormat as ExpansionFormat
from mcftensor.formats.format import Format as Format
from mcftensor.formats.format import PlainFormat as PlainFormat
from mcftensor.formats.format import bf16x2 as bf16x2
from mcftensor.formats.format import bf16x3 as bf16x3
from mcftensor.formats.format import default_format as default_format
from mcftensor.formats.format import fp16x2 as fp16x2
from mcftensor.formats.format import fp32x2 as fp32x2
from mcftensor.formats.format import fp32x3 as fp32x3
from mcftensor.formats.format import fp64x2 as fp64x2
from mcftensor.formats.format import named as named
from mcftensor.formats.format import require_expansion_format as require_expansion_format
from mcftensor.formats.format import require_format as require_format
from mcftensor.formats.tails import TailFormat as TailFormat
from mcftensor.formats.tails import bf16i8 as bf16i8
from mcftensor.formats.tails import bf16i16 as bf16i16
