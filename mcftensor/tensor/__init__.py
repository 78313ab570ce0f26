"""`MCFTensor`, the tensor class, and its deferred form within a step of an optimizer."""

from mcftensor.tensor.components import Role as Role
from mcftensor.tensor.step_tensors import GradientTensor as GradientTensor
from mcftensor.tensor.step_tensors import TapedTensor as TapedTensor
from mcftensor.tensor.tensor import MCFTensor as MCFTensor
