"""`levanter-infer plan`: capacity planning: memory and speed of a job on a machine that is not here.

`targets` are the machines, `spec` describes the engine that is planned, `figures` are sizes that follow from shapes
alone, `compiled` (in a process of its own, `compiler`) are the compiled programs of the engine, `roofline` bounds their
speed, `search` finds the smallest change with which a job fits, `plan` puts them together and `report` prints them.
"""
