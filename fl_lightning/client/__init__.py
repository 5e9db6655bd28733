"""The client: the base class of methods, the services of a client, and the store of its state."""

from fl_lightning.client.checks import check_loss_returned as check_loss_returned
from fl_lightning.client.context import ClientContext as ClientContext
from fl_lightning.client.module import ClientModule as ClientModule
from fl_lightning.client.personal import InitialModelClient as InitialModelClient
from fl_lightning.client.personal import OwnModelClient as OwnModelClient
from fl_lightning.client.personal import PersonalHeadClient as PersonalHeadClient
from fl_lightning.client.personal import WholeModelClient as WholeModelClient
from fl_lightning.client.personal import check_features as check_features
from fl_lightning.client.personal import check_head as check_head
from fl_lightning.client.personal import check_part_of_net as check_part_of_net
from fl_lightning.client.personal import heads_of as heads_of
from fl_lightning.client.services import BatchTransfer as BatchTransfer
from fl_lightning.client.services import ClientServices as ClientServices
from fl_lightning.client.services import MetricAccumulator as MetricAccumulator
from fl_lightning.client.services import attach_services as attach_services
