from __future__ import annotations

import torch

from tests.untuned import leave_untuned

if torch.cuda.is_available():
    leave_untuned()
