"""``cloudtrain bench``: the cost of parts on this machine or cluster, against their alternatives.

A subject and its peers alternate in one run, after a warm-up; results are checked before they are timed.
"""
