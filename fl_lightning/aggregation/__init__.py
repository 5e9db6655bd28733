"""The server's side of a round: rules, server modules, and transforms of updates on their way to them."""

from fl_lightning.aggregation.codecs import FP16 as FP16
from fl_lightning.aggregation.codecs import QSGD as QSGD
from fl_lightning.aggregation.codecs import Codec as Codec
from fl_lightning.aggregation.codecs import RandomK as RandomK
from fl_lightning.aggregation.codecs import Sign as Sign
from fl_lightning.aggregation.codecs import TopK as TopK
from fl_lightning.aggregation.guard import NonFiniteGuard as NonFiniteGuard
from fl_lightning.aggregation.latest_models import LatestModels as LatestModels
from fl_lightning.aggregation.pacing import FedAsync as FedAsync
from fl_lightning.aggregation.pacing import FedBuff as FedBuff
from fl_lightning.aggregation.pacing import Pacing as Pacing
from fl_lightning.aggregation.pacing import Rounds as Rounds
from fl_lightning.aggregation.privacy import PrivateAggregator as PrivateAggregator
from fl_lightning.aggregation.prototypes import PrototypeServer as PrototypeServer
from fl_lightning.aggregation.robust import GatheringAggregator as GatheringAggregator
from fl_lightning.aggregation.robust import GeometricMedianAggregator as GeometricMedianAggregator
from fl_lightning.aggregation.robust import KrumAggregator as KrumAggregator
from fl_lightning.aggregation.robust import MedianAggregator as MedianAggregator
from fl_lightning.aggregation.robust import TrimmedMeanAggregator as TrimmedMeanAggregator
from fl_lightning.aggregation.server_parts import Aggregator as Aggregator
from fl_lightning.aggregation.server_parts import Inquiry as Inquiry
from fl_lightning.aggregation.server_parts import PartialAggregate as PartialAggregate
from fl_lightning.aggregation.server_parts import ServerModule as ServerModule
from fl_lightning.aggregation.server_parts import StateBuffers as StateBuffers
from fl_lightning.aggregation.transforms import NormClip as NormClip
from fl_lightning.aggregation.transforms import UpdateTransform as UpdateTransform
