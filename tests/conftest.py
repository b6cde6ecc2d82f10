"""Lets the tests import the modules at the repository's root, wherever pytest is started."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
