"""Write the digests of known results, as this machine's CPU gives them, into the package."""

from __future__ import annotations

import json

import torch

from mcftensor.device_checks.known_results import FILE, made_digests

if __name__ == "__main__":
    FILE.write_text(json.dumps(made_digests(torch.device("cpu")), indent=0) + "\n")
