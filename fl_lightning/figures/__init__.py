"""Drawings of the papers' figures: each takes the runs of a figure and gives a picture or a table."""

from fl_lightning.figures.classwise import ClassMaps as ClassMaps
from fl_lightning.figures.clients import ClassBars as ClassBars
from fl_lightning.figures.clients import ClassCounts as ClassCounts
from fl_lightning.figures.clients import DegreeMap as DegreeMap
from fl_lightning.figures.clients import DistanceScatter as DistanceScatter
from fl_lightning.figures.clients import LocalProgress as LocalProgress
from fl_lightning.figures.clients import LocalShares as LocalShares
from fl_lightning.figures.clients import OneClass as OneClass
from fl_lightning.figures.curves import Consistency as Consistency
from fl_lightning.figures.curves import Curves as Curves
from fl_lightning.figures.drawing import Drawing as Drawing
from fl_lightning.figures.drawing import Drawn as Drawn
from fl_lightning.figures.drawing import Series as Series
from fl_lightning.figures.exchange import PredictedDistributions as PredictedDistributions
from fl_lightning.figures.exchange import RoundsToTarget as RoundsToTarget
from fl_lightning.figures.models import Circles as Circles
from fl_lightning.figures.models import Embedding as Embedding
from fl_lightning.figures.models import Landscapes as Landscapes
from fl_lightning.figures.models import NeuronClasses as NeuronClasses
from fl_lightning.figures.sweeps import EndTable as EndTable
from fl_lightning.figures.sweeps import Sweep as Sweep
