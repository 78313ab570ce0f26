"""Tensors with a power-of-two scale, and rules for them; README.md lists the modules."""

from mcftensor.scaling import elementwise_rules as elementwise_rules
from mcftensor.scaling import norm_rules as norm_rules
from mcftensor.scaling import softmax_rules as softmax_rules
from mcftensor.scaling import structure_rules as structure_rules
from mcftensor.scaling import sum_rules as sum_rules
from mcftensor.scaling.fp8 import Fp8Linear as Fp8Linear
from mcftensor.scaling.fp8 import fp8_linear as fp8_linear
from mcftensor.scaling.fp8 import fp8_product as fp8_product
from mcftensor.scaling.rescaling import rescale as rescale
from mcftensor.scaling.rescaling import rescale_grad as rescale_grad
from mcftensor.scaling.rule_table import fallback as fallback
from mcftensor.scaling.scaled import ScaledTensor as ScaledTensor
from mcftensor.scaling.scaled_format import ScaledFormat as ScaledFormat
from mcftensor.scaling.scaled_format import scaled as scaled
from mcftensor.scaling.scaled_models import scalify as scalify
from mcftensor.scaling.scaled_numbers import counting as counting
