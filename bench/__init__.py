"""Measure kvloop: ``kvloop bench load | ttft | peers | soak | store``. See docs/performance.md for method and results."""
