"""What a run will do on a cluster, before it is started: nothing is trained, and no learner is imported."""
