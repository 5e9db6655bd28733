"""Drawings and tables of the runs of an experiment, as the papers have them."""

from fl_lightning.papers.clients import ClassBars as ClassBars
from fl_lightning.papers.clients import ClassCounts as ClassCounts
from fl_lightning.papers.clients import DegreeMap as DegreeMap
from fl_lightning.papers.clients import DistanceScatter as DistanceScatter
from fl_lightning.papers.clients import LocalProgress as LocalProgress
from fl_lightning.papers.clients import LocalShares as LocalShares
from fl_lightning.papers.clients import OneClass as OneClass
from fl_lightning.papers.clients import PredictedDistributions as PredictedDistributions
from fl_lightning.papers.curves import ClassMaps as ClassMaps
from fl_lightning.papers.curves import Consistency as Consistency
from fl_lightning.papers.curves import Curves as Curves
from fl_lightning.papers.drawing import Drawing as Drawing
from fl_lightning.papers.drawing import Drawn as Drawn
from fl_lightning.papers.drawing import Series as Series
from fl_lightning.papers.models import Circles as Circles
from fl_lightning.papers.models import Embedding as Embedding
from fl_lightning.papers.models import Landscapes as Landscapes
from fl_lightning.papers.models import NeuronClasses as NeuronClasses
from fl_lightning.papers.paper_table import Measure as Measure
from fl_lightning.papers.paper_table import PaperTable as PaperTable
from fl_lightning.papers.sweeps import EndTable as EndTable
from fl_lightning.papers.sweeps import RoundsToTarget as RoundsToTarget
from fl_lightning.papers.sweeps import Sweep as Sweep
