"""The rule of descent in pure torch: what a worker computes, and what the shared parameters become.

Nothing here knows a process, a socket or a clock, so every backend computes the same bits.
"""
