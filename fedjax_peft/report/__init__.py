"""Reports of runs, studies and partitions, sweeps, and model cards for the hub.

A report is made in this order, a file for each step:

* ``records`` reads the files of runs, and ``study`` groups the runs into ``cells``: a
  method with one choice of the swept settings, and its runs by seed.
* ``comparison`` compares them. ``judgement`` ranks their scores (``separation``,
  ``intervals``), ``columns`` are what a row shows, and ``sentences`` say what follows.
* The columns become tables of a terminal and of files (``tables``, ``table_files``) and,
  with ``targets``, ``cautions`` and figures, the page (``page``).
* Figures are those of curves (``plots``), clients (``details``) and layers
  (``layers``), drawn in the style of ``figure_files`` and put into the page by
  ``chart`` and ``inline_svg``.
"""
