"""Decisions of the serving engine, as pure functions of plain numbers. The simulator and the runtime call the same ones.

They are compiled because the simulator asks millions of times; called from Python they take the same arguments.
"""
