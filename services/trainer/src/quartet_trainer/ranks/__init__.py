"""One trainer over several processes: the ranks that torchrun starts (docs/ranks.md).

agent.py    torchrun, which ends as its ranks do
meeting.py  where the ranks of one machine find each other
command.py  what the first rank tells the others, and its bytes
group.py    the group: how ranks tell, agree and add up
balance.py  who computes which rows
context.py  sequences that neighbouring ranks share
columns.py  the part of a micro-batch that each of them computes
sharding.py a model whose every rank holds its part (FSDP2)
layout.py   tensors that are whole here, or spread over the ranks
muon.py     Muon, which needs whole matrices
shards.py   tensors of a saved state, each rank's part written and read by that rank
alone.py    the group of one process, which costs nothing
lead.py     a run of the first rank: every call of it is a call of all
follow.py   the other ranks
launch.py   from torchrun's environment to a trainer that serves
"""
