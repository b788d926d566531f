"""Clusters: preflight, rendering and submitting of sbatch scripts, and what runs inside a job before its stages."""
