"""``cloudtrain bench``: what the parts cost on this machine, against what one would use instead.

A subject and its peers alternate in one run, after a warm-up; results are checked before they are timed.
"""
