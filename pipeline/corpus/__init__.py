"""Corpora: tokenised examples on disk, in a bucket or in place; views of them; their preparation.

Whatever kind a corpus is, `interface.AnyCorpus` says what it has: lengths, a fingerprint, and sides
that tokens are read from. `engines` run the work of a preparation.
"""

from pipeline.corpus import engines
from pipeline.corpus.corpora import Corpora
from pipeline.corpus.corpus import Corpus
from pipeline.corpus.description import describe, make_corpus
from pipeline.corpus.examples import Examples
from pipeline.corpus.in_place import InPlace
from pipeline.corpus.interface import AnyCorpus
from pipeline.corpus.joined import Joined
from pipeline.corpus.pairs import Pairs
from pipeline.corpus.preparing.job import Job
from pipeline.corpus.preparing.pairs import prepare_pairs
from pipeline.corpus.preparing.preparation import prepare, prepare_job, prepare_share
from pipeline.corpus.side import Side
from pipeline.corpus.sides import Sides
from pipeline.corpus.split import Split
from pipeline.corpus.stored.writer import Writer
from pipeline.corpus.tasks import CAUSAL, INPUTS, TARGETS, Task
from pipeline.corpus.views.copies import duplicates
from pipeline.corpus.views.decoded import Decoded
from pipeline.corpus.views.groups import Groups, truncate_groups
from pipeline.corpus.views.masked import Masked
from pipeline.corpus.views.middle import FillInTheMiddle
from pipeline.corpus.views.pictures import patch_grid, patchify
from pipeline.corpus.views.prefixes import find_prefixes

__all__ = [
    "CAUSAL",
    "INPUTS",
    "TARGETS",
    "AnyCorpus",
    "Corpora",
    "Corpus",
    "Decoded",
    "Examples",
    "FillInTheMiddle",
    "Groups",
    "InPlace",
    "Job",
    "Joined",
    "Masked",
    "Pairs",
    "Side",
    "Sides",
    "Split",
    "Task",
    "Writer",
    "describe",
    "duplicates",
    "engines",
    "find_prefixes",
    "make_corpus",
    "patch_grid",
    "patchify",
    "prepare",
    "prepare_job",
    "prepare_pairs",
    "prepare_share",
    "truncate_groups",
]
