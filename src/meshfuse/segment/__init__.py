"""Cutting a fusion into groups that can each become one kernel."""
