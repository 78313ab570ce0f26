"""Write the digests of known results, as this machine's CPU gives them, into the package."""

from __future__ import annotations

from mcftensor.tools.known_results import write_digests

if __name__ == "__main__":
    write_digests()
