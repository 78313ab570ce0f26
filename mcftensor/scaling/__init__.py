"""Scales that propagate: formats of low-precision data times a power of two, and rules for them.

A tensor in such a format is an MCFTensor, which asks its format for the rules.

`scaled_format` has the formats: how data is stored and decoded. `scaled` makes tensors of data and
an exponent; `exponents` computes with powers of two, and `scaled_numbers` with numbers that are not
rounded yet. `ruling` finds the rule of an operator:
`arithmetic_rules`, `reductions`, `choices`, `activations`, `products`, `convolutions`, `norms`,
`losses`, `pointwise_losses`, `moving_rules`, `scattering`, and `scaled_steps` for optimizers.
What users call is in `switch`, `rescaling`, `fp8` and `counts`.
"""

from mcftensor.scaling import activations as activations
from mcftensor.scaling import arithmetic_rules as arithmetic_rules
from mcftensor.scaling import choices as choices
from mcftensor.scaling import convolutions as convolutions
from mcftensor.scaling import losses as losses
from mcftensor.scaling import moving_rules as moving_rules
from mcftensor.scaling import norms as norms
from mcftensor.scaling import pointwise_losses as pointwise_losses
from mcftensor.scaling import products as products
from mcftensor.scaling import reductions as reductions
from mcftensor.scaling import scaled_steps as scaled_steps
from mcftensor.scaling import scattering as scattering
from mcftensor.scaling.counts import counting as counting
from mcftensor.scaling.fp8 import Fp8Linear as Fp8Linear
from mcftensor.scaling.fp8 import fp8_linear as fp8_linear
from mcftensor.scaling.fp8 import fp8_product as fp8_product
from mcftensor.scaling.rescaling import rescale as rescale
from mcftensor.scaling.rescaling import rescale_grad as rescale_grad
from mcftensor.scaling.ruling import fallback as fallback
from mcftensor.scaling.scaled import ScaledTensor as ScaledTensor
from mcftensor.scaling.scaled_format import ScaledFormat as ScaledFormat
from mcftensor.scaling.scaled_format import scaled as scaled
from mcftensor.scaling.switch import scalify as scalify
