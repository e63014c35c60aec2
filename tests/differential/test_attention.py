"""Every implementation of attention against the torch reference, on all variants; Triton's is interpreted
where there is no GPU, and compiled where there is one."""

import importlib.util
import itertools
import math
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from differential import attention_cases
from differential.attention_cases import SHAPES, VARIANTS, Case, Model, Variant, case_of, judge, same_bytes
from pagoda.attention import _native, _reference
from pagoda.attention._call import Call

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
