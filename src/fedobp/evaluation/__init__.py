"""Evaluation: metrics, the protocol, and the evaluators of training clients and of new ones."""

from fedobp.evaluation.evaluator import Counts, Evaluator, Personal, Report, report
from fedobp.evaluation.metrics import Accuracy, ClientCounts, accuracy, count, merge
from fedobp.evaluation.new_clients import NewClients
from fedobp.evaluation.protocol import PAPER_ROUNDS, Protocol, make_protocol
from fedobp.evaluation.view import ServerView

__all__ = [
    "PAPER_ROUNDS", "Accuracy", "ClientCounts", "Counts", "Evaluator", "NewClients", "Personal", "Protocol", "Report",
    "ServerView", "accuracy", "count", "make_protocol", "merge", "report",
]  # fmt: skip
