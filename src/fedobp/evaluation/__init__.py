"""Evaluation: metrics, the protocol, and the evaluators of training clients and of new ones."""

from fedobp.evaluation.evaluator import Counts, Evaluator, Personal, Report, metrics_of, report, report_from_json
from fedobp.evaluation.metrics import Accuracy, ClientCounts, accuracy, count, merge
from fedobp.evaluation.new_clients import NewClients
from fedobp.evaluation.protocol import PAPER_ROUNDS, Protocol, make_protocol
from fedobp.evaluation.scoring import Confusion, Metric, Metrics, metric_from_json, metrics_to_json
from fedobp.evaluation.view import ServerView

__all__ = [
    "PAPER_ROUNDS", "Accuracy", "ClientCounts", "Confusion", "Counts", "Evaluator", "Metric", "Metrics", "NewClients",
    "Personal", "Protocol", "Report", "ServerView", "accuracy", "count", "make_protocol", "merge",
    "metric_from_json", "metrics_of", "metrics_to_json", "report", "report_from_json",
]  # fmt: skip
