"""Learning schedulers: a pointer network, its trainers, and what they write.

`pointer` decides in NumPy and needs no torch; the trainers need the extra `train`.
"""
