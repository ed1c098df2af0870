"""Profiles and foreign tables checked for faults by kind: what is no measurement, and what a fit cannot tell."""
