import json
import subprocess
import sys

CODE = """
import json, sys
from tools.process import children
children.import_light_nltk()
before = [name for name in children.UNUSED if name in sys.modules]
from nltk.translate.bleu_score import sentence_bleu
score = sentence_bleu([["a", "b", "c", "d", "e"]], ["a", "b", "c", "d", "f"])
import scipy.stats, sklearn
print(json.dumps([before, score, scipy.stats.norm.cdf(0.0), bool(sklearn.__version__)]))
"""


def test_scores_are_there_and_helpers_are_not_imported_and_can_be():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, score, half, there = json.loads(done.stdout)
    assert before == [] and 0.6 < score < 0.8 and half == 0.5 and there
