"""`MCFTensor`, the tensor class, and results of it that wait."""

from mcftensor.tensor.tensor import MCFTensor as MCFTensor
from mcftensor.tensor.tensor import Role as Role
