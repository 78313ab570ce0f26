"""What a process imports before it forks: libraries that take seconds, and nothing of ours."""

import mpmath  # noqa: F401
import numpy as np  # noqa: F401
import pytest  # noqa: F401
import torch
import torch.testing._internal.common_methods_invocations

torch.set_num_threads(1)
