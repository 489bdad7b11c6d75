"""``cloudtrain bench``: the cost of the parts on this machine, against their alternatives.

A subject and its peers alternate in one run, after a warm-up; results are checked before they are timed.
"""
