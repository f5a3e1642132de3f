"""Check layouts: by the program that XLA compiles, by the numbers it computes, and by where the shards are.

compiled    a planned step, compiled without values: memory and collectives
numbers     results of the sharded model compared with those of one device
placement   shards of a live model compared with the plan
"""
