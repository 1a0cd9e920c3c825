"""Loggers of others: metrics.jsonl under the same names in TensorBoard, W&B and trackio."""
