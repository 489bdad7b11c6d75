"""What a run will do on a cluster, before it is started: nothing is trained, and the model is not built."""
