"""The names of what is in the folder of a run, for all that write or read one."""

CONFIG, METRICS, SUMMARY, WEIGHTS = "config.yaml", "metrics.jsonl", "summary.json", "model.weights.h5"
RUN, RECEIPT, CHECKPOINTS = "run.json", "receipt.json", "checkpoints"
DAWNBENCH, DAWNBENCH_LINES, MLLOG = "dawnbench.json", "dawnbench.tsv", "mllog.txt"
