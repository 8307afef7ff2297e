"""What a user adds to a run, one file a callback; a file dropped here can be named in a config as callbacks.<Class>."""

from callbacks.completion_logger import CompletionLogger
from callbacks.entropy_guard import EntropyGuard
from callbacks.entropy_profile import EntropyProfile
from callbacks.evaluation_report import EvaluationReport
from callbacks.export_hf import ExportHF
from callbacks.prediction_writer import PredictionWriter
from callbacks.quadrant_gradients import QuadrantGradients
from callbacks.quadrants import Quadrants
from callbacks.run_summary import RunSummary
from callbacks.silenced_tokens import SilencedTokens
from callbacks.token_viewer import TokenViewer

__all__ = [
    "CompletionLogger",
    "EntropyGuard",
    "EntropyProfile",
    "EvaluationReport",
    "ExportHF",
    "PredictionWriter",
    "QuadrantGradients",
    "Quadrants",
    "RunSummary",
    "SilencedTokens",
    "TokenViewer",
]
