"""Weights on the host: tails, states and steps in host memory, plain weights on the device."""

from mcftensor.host.host_weights import HostWeights as HostWeights
from mcftensor.host.host_weights import weights as weights
