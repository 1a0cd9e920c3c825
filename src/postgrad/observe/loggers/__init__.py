"""External loggers: metrics.jsonl under the same names in TensorBoard, W&B, trackio and MLflow."""
