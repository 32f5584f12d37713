"""GLM-5 to 5.2: DeepSeek-V3.2's architecture; layers may share the choice of an earlier one's indexer (IndexShare).

Architecture: GLM-5 Team, "GLM-5: from Vibe Coding to Agentic Engineering", 2026; sharing: arXiv 2603.12201.
"""

from __future__ import annotations

from slipstream.models.deepseek_v32 import NAMES, block

__all__ = ["NAMES", "block"]
