"""Decisions of the serving engine, as pure functions of plain numbers, called by the simulator and the runtime alike.

They are compiled because the simulator asks millions of times; called from Python they take the same arguments.
"""
