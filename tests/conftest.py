import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run side by side: threads of several would wait for each other
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
