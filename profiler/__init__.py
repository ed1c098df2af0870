"""Measures what a plan rests on: steps of the runtime's own engine, links and memories, on the machine at hand."""
