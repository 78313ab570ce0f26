"""Tests of other libraries, whose parameters are read from a clone of each."""
