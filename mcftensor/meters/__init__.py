"""Meters: what updates lose, and which weights are frozen."""
