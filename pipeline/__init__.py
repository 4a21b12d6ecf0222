"""Lockstep."""
from pipeline.bucket import Bucket
from pipeline.fit import fit_buckets
from pipeline.plan import Plan, PlannedBatch
