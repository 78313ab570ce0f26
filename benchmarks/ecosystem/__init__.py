"""The rows of the page "Works with", and how they are tried."""
