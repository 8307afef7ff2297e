"""The objective: advantage estimator x surrogate x token selector x aggregation, each a small class YAML can name."""

from stapo_lightning.objective.advantages import AdvantageEstimator, GroupCentered, GroupNormalized, group_statistics
from stapo_lightning.objective.aggregation import Aggregation, ConstantLength, SequenceMean, TokenMean
from stapo_lightning.objective.gradient import (
    logit_gradient_weight,
    squared_logit_gradient_norm,
    squared_logit_gradients,
)
from stapo_lightning.objective.importance import Importance, ImportanceOutput, TruncatedImportance
from stapo_lightning.objective.kl import K1, K2, K3, KLEstimator
from stapo_lightning.objective.loss import policy_loss
from stapo_lightning.objective.silencing import (
    S2T,
    AllCandidates,
    HighEntropy,
    KeepAll,
    OneQuadrant,
    RandomCandidates,
    RandomPositive,
    S2TVersion1,
    TokenSelector,
    TopEntropy,
)
from stapo_lightning.objective.surrogate import Clipped, DualClipped, Surrogate

__all__ = [
    "K1",
    "K2",
    "K3",
    "S2T",
    "AdvantageEstimator",
    "Aggregation",
    "AllCandidates",
    "Clipped",
    "ConstantLength",
    "DualClipped",
    "GroupCentered",
    "GroupNormalized",
    "HighEntropy",
    "Importance",
    "ImportanceOutput",
    "KLEstimator",
    "KeepAll",
    "OneQuadrant",
    "RandomCandidates",
    "RandomPositive",
    "S2TVersion1",
    "SequenceMean",
    "Surrogate",
    "TokenMean",
    "TokenSelector",
    "TopEntropy",
    "TruncatedImportance",
    "group_statistics",
    "logit_gradient_weight",
    "policy_loss",
    "squared_logit_gradient_norm",
    "squared_logit_gradients",
]
