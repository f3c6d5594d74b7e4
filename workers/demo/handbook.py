"""The document the demo's chat is about: a made-up handbook, long enough to make its prefill felt."""

from typing import Final

TITLE: Final = "THE SKERRY POINT STATION HANDBOOK"

TEXT: Final = """\
What the station is for
Skerry Point is a tide, weather and radio station on the north side of Halder Sound. It measures the
height of the sea, the wind, the air pressure and the water temperature, and it sends these readings to
the harbour office in Brannock every ten minutes. Ships that enter the sound after dark rely on them,
because the channel between the two sandbanks is only deep enough for three hours on either side of high
water. The station also keeps the emergency radio for the fishing boats of the outer islands. A crew of
four lives here for five weeks at a time: the keeper, who is in charge, the technician, the radio operator
and the cook, who also looks after the boat. The relief crew arrives on the supply ship Marigold on the
first calm day after the fifth Tuesday.

The daily round
The round begins at six in the morning and takes about an hour and a half. The person on duty walks from
the main house to the battery shed, then along the sea wall to the tide gauge, up the path to the wind
mast, and back past the fuel store. At each place there is a green box with a clipboard inside. Write down
the time, the reading and your initials. If a reading is missing, draw a line through the space; never
fill it in later from memory. In the battery shed, read the voltage of each of the eight banks. A healthy
bank shows between 50 and 54 volts before sunrise. A bank below 48 volts must be taken out of service with
the red lever, and the technician must be woken. At the tide gauge, look into the stilling well and check
that the float moves freely. Weed is the usual trouble, and it is removed with the long brass hook, never
by hand, since the well is nine metres deep and its edge is slippery. At the wind mast, look at the three
cups from below; a bent cup reads too low, and in strong wind it may come off.

Power
The station runs on sunlight and wind, and on a diesel generator when both are lacking. The solar panels
stand on the south roof and give up to six kilowatts on a clear day in June, but less than one in
December. The wind turbine gives three kilowatts in a fresh breeze and is stopped by its brake above 22
metres per second. The generator starts by itself when the batteries fall to thirty per cent and stops
when they reach seventy. It burns four litres an hour. The fuel store holds 2,000 litres, which must last
from one supply ship to the next, so the generator should not run for more than 400 hours in a season.
When the fuel gauge shows less than 300 litres, the keeper orders a saving day: the electric oven, the
washing machine and the heating of the two guest rooms are switched off, and the radio is used at low
power. The refrigerator of the medicine cabinet is never switched off, and neither is the emergency radio.

Water
Drinking water comes from the rain tank behind the kitchen. It holds twelve cubic metres and is filtered
twice, first through sand and then through a ceramic candle. The candle is scrubbed every Friday and
replaced every second month. In a dry summer the desalinator in the boat house can make forty litres an
hour, but it needs two kilowatts, so it is used only at noon and only when the batteries are above eighty
per cent. Salt water is used for washing the decks and for the fire pump. Nobody may use the fire pump for
cleaning, because sand in its valve once kept it from starting when the boat house burned.

The tide gauge
The gauge is the reason why the station was built, and it has been read without a break for ninety-one
years. A float in the stilling well lifts a steel tape, and the tape turns a wheel whose position is
recorded every minute. The zero of the gauge is a bronze bolt in the rock, 4.12 metres below the doorstep
of the main house. On the first Monday of each month the technician compares the gauge with the bolt by
means of a levelling staff. A difference of up to five millimetres is written down and left alone. A
difference of more than five millimetres is corrected by turning the brass screw on the wheel, a quarter
turn for each millimetre, and the correction is sent to Brannock with the words GAUGE ADJUSTED. If the
float is damaged, the pressure sensor on the sea bed takes over. It is accurate to three centimetres only,
because it is upset by waves and by the salt of the water, so a spare float must be fitted within two
days. There are two spare floats in the long chest under the stairs.

The radio
The emergency radio listens on channel 16 day and night. The radio operator answers between seven in the
morning and ten in the evening; at night the bell in the keeper's room rings when a call comes in. Every
call is entered in the blue book with the time, the name of the vessel, its position and what was asked.
When a vessel is in distress, repeat its position aloud, call the lifeboat at Brannock on the telephone
with the yellow handle, and stay on the channel until the lifeboat answers the vessel itself. Do not send
anyone out in the station boat unless the keeper agrees and the waves are lower than one metre and a half.
Weather reports are read out at eight, at noon, at four and at eight in the evening, slowly and twice. The
antenna is lowered when lightning is closer than ten kilometres, and during that time the portable set in
the kitchen is used. Its battery lasts for six hours.

Storms
A storm warning is given by Brannock, or by the keeper when the pressure falls by more than six
hectopascals in three hours. On a warning the crew closes the nine storm shutters on the west side, ties
down the boat with both chains, brings the clipboards indoors and fills the bath with drinking water. The
wind turbine is braked and its blades are tied. The generator is started by hand and runs until the storm
has passed, because salt on the insulators of the solar panels may cause a short circuit. Nobody walks on
the sea wall when spray reaches the path. In the great storm of the year in which the old mast fell, the
sea came as high as the third step of the main house, and the crew spent the night in the lamp room, where
blankets, lamp oil, dry biscuits and forty litres of water are kept in the grey cupboard. These stores are
counted twice a year, in April and in September.

Accidents and illness
The medicine cabinet is in the corridor between the kitchen and the radio room, and the keeper and the
cook both have a key. The doctor in Brannock can be reached at any hour by telephone, or by radio on
channel 22. Before you call, write down the patient's temperature, pulse and pain, and what was eaten. For
a burn, hold the skin under cool running water for twenty minutes. For a fall into the sea, take off wet
clothes, wrap the person in wool, give warm sweet drinks and do not rub the arms or legs. A helicopter can
land on the flat rock behind the fuel store if the wind is below 18 metres per second; the landing place
is marked with four orange drums, which must be filled with stones, since empty drums once blew into the
rotor. Every accident, however small, is described in the red book on the same day.

Visitors
Scientists, inspectors and painters may stay in the two guest rooms for up to ten nights. They bring their
own bedding and a share of the food, and they sign the visitors' book. They may not enter the battery shed
alone. Dogs are not allowed between March and August, because of the terns that nest on the shingle below
the mast. The path through the shingle is closed with a rope during those months, and the daily round goes
by the upper path, which takes a quarter of an hour longer. Photographs of the station may be published,
but not of the radio room.

Stores and the supply ship
The Marigold calls once every five weeks with food, fuel, letters and spare parts. The order must reach
Brannock nine days before she sails, in three lists: food, ordered by the cook; parts, ordered by the
technician; everything else, ordered by the keeper. She cannot come alongside; her goods are brought in by
the station boat, at most six hundred kilograms in one trip, and only on a rising tide. Fuel is pumped
through the black hose. Two people watch the hose from end to end, and the pump is stopped at the first
drop in the water. Empty gas bottles, glass, metal and old batteries go back with the ship. Kitchen waste
is composted behind the rain tank, except for bones, which attract rats.

The station boat
The boat is called Plover. She is six metres long, carries eight people or six hundred kilograms, and has
a diesel engine of thirty horsepower. The cook looks after her, but everyone on the station must be able
to start her engine, and each member of the crew does so once in the first week, with the others watching.
Before the engine is started, open the sea valve, check the oil with the stick, and turn the flywheel
twice by hand. The engine is warm enough when the needle stands in the white field. Plover is never used
by one person alone, and life jackets are put on in the boat house, not in the boat. When she comes back,
she is washed with rain water, her drain plug is taken out and hung on its nail, and the hours of the
engine are entered in the green book. After every fifty hours the oil is changed. The old oil goes into
the drum with the white ring and leaves with the Marigold. In winter the boat stays on her cradle from the
first of December until the first of March, and only the lifeboat may be asked to fetch a patient.

Fire
There are eleven fire extinguishers on the station, and a list of them hangs inside the door of every
building. The red ones contain foam and are used for wood, paper and fuel. The black ones contain carbon
dioxide and are used for everything electric; after using one indoors, leave the room and open its window
from the outside. In the battery shed only black ones may be used. The fire bell is rung by pulling the
chain beside the kitchen door. Whoever hears it goes to the flagpole to be counted, and nobody goes back
for belongings. The keeper gives the orders, the technician cuts the power with the large switch behind
the glass, the radio operator tells Brannock, and the cook starts the fire pump. A fire drill is held in
the second week of every stay, at an hour that only the keeper knows beforehand.

Clocks and books
All times on the station are given in universal time, in summer as well as in winter. The master clock
hangs in the radio room and is compared with the time signal at noon; the clock in the kitchen is set five
minutes fast, so that dinner begins punctually, and must not be used for readings. There are five books.
The white book holds the orders and the handing over from one keeper to the next. The red book is for
accidents, the blue book for radio calls, the green book for engines, and the brown book for birds, seals
and anything strange that is seen at sea. A book is never torn, and a mistake is struck out with one line,
so that it can still be read. Full books go to the archive in Brannock, where those of the first forty
years have been copied on film. Anyone who has lived on the station may read them there.

Birds and seals
Since the first winter the crews have counted the birds and seals of the Point, and the count is held on
the last day of each month, at low water, from the bench above the landing. Two people count, each on
their own, and write down their numbers before they compare them. Where the numbers differ by more than a
tenth, both count again. Terns are counted by nests and only from the rope. The grey seals lie on the
outer rock and are counted by heads. An injured animal is left where it is, unless the wildlife officer in
Brannock asks for it to be moved. The brown book shows 412 nests in the best year and 37 in the worst,
which followed the summer in which a rat came ashore in a sack of onions. For this reason every sack is
opened and shaken out in the boat house before it is carried up to the kitchen.

Leaving the station
On the last day the outgoing keeper and the incoming keeper walk the whole round together. They read the
batteries, the fuel gauge and the rain tank, compare the clocks, and count the flares, of which there must
be at least twelve. The outgoing keeper tells of everything that is broken, in the order in which it
should be mended, and both sign the last page of the white book. The station is never left empty. If the
relief crew cannot land, the old crew stays, and receives an additional day of leave for each day of
waiting. The lamp in the window of the kitchen is lit every evening by the person who washes the dishes.
It guides no ship any more, but it has been lit on every evening since the station was opened, and the
crews would like this to continue.

A list of numbers worth knowing by heart
Eight battery banks. Nine storm shutters. Two spare floats. Twelve flares at least. Four orange drums.
Eleven fire extinguishers. Three hundred litres of fuel: saving day. Thirty per cent: the generator
starts. Seventy per cent: it stops. Five millimetres: the gauge is left alone. Six hectopascals in three
hours: storm. Channel 16 for distress, channel 22 for the doctor. Nine days before sailing: the order.
Five weeks: the relief.
"""
"""Sections parted by empty lines; the first line of each is its heading. Lines are wrapped for the source
only."""
