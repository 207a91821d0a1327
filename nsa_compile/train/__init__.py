"""The trainer: what ``nsa-compile train`` runs."""
