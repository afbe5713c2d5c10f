-- quota: fixed windows by Redis TIME (needs prelude), in UTC or in the time zone of the customer. A week begins on Monday; months and
-- years are those of the calendar. MONDAY_MS: from the Monday before 1970-01-01, a Thursday, until then.
local SECONDS = {second = 1, minute = 60, hour = 3600, day = 86400, week = 604800}
local MONDAY_MS = 3 * 86400000
local windows = {}

-- month_of(days): the month, counted from January 1970, of a day counted from 1970-01-01. days_of(months): the first day of a
-- month. Both from Howard Hinnant, "chrono-compatible low-level date algorithms": years start in March, so that a leap day is
-- the last day of its year.
local function month_of(days)
  local z = days + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor((doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  return (yoe + era * 400 - 1970) * 12 + 2 + math.floor((5 * doy + 2) / 153)
end

local function days_of(months)
  local march = months - 2
  local year, month = 1970 + math.floor(march / 12), march % 12
  local era = math.floor(year / 400)
  local yoe = year - era * 400
  return era * 146097 + yoe * 365 + math.floor(yoe / 4) - math.floor(yoe / 100) + math.floor((153 * month + 2) / 5) - 719468
end

-- window_at(period, ms) -> the number of the window that contains this time. window_start(period, number) -> the time at which it
-- begins. Both in ms on the clock of the zone. `period`: such as 1day or 3month; the name of a quota of another unit than requests
-- is its period with a mark, such as 1day:gpu.
local function window_at(period, ms)
  local count, unit = string.match(period, '^(%d+)(%a+)')
  local length = SECONDS[unit]
  if length then return math.floor((ms + (unit == 'week' and MONDAY_MS or 0)) / (length * count * 1000)) end
  return math.floor(month_of(math.floor(ms / 86400000)) / (unit == 'year' and 12 * count or tonumber(count)))
end

local function window_start(period, number)
  local count, unit = string.match(period, '^(%d+)(%a+)')
  local length = SECONDS[unit]
  if length then return number * length * count * 1000 - (unit == 'week' and MONDAY_MS or 0) end
  return days_of(number * (unit == 'year' and 12 * count or tonumber(count))) * 86400000
end

-- local_ms(zone, ms): a time on the clock of the zone. zone: {offset in s, instant in s from which the next one holds, offset...}.
-- instant_ms(zone, ms): the first instant at which the clock of the zone shows this or, where it skips it, a later time.
local function local_ms(zone, ms)
  local i = 1
  while zone[i + 1] and ms >= zone[i + 1] * 1000 do i = i + 2 end
  return ms + zone[i] * 1000
end

local function instant_ms(zone, ms)
  local i = 1
  while zone[i + 1] and ms - zone[i] * 1000 >= zone[i + 1] * 1000 do i = i + 2 end
  return math.max(ms - zone[i] * 1000, i > 1 and zone[i - 1] * 1000 or -math.huge)
end

-- window(period, zone, stored) -> number, end in ms and used units of the current window. `stored`: "<number> <units>" of the last
-- use. A window that was begun lasts until the next one begins, also if the time zone of the customer, or the clock of Redis, is set
-- back meanwhile: each date has one window, so no use is forgotten or counted twice. MOST_AHEAD: more is a fault of a clock.
-- Seconds, minutes and hours are those of UTC in each zone.
local MOST_AHEAD = 2
local function window(period, zone, stored)
  local w = windows[period]
  if zone and (SECONDS[string.match(period, '^%d+(%a+)')] or 86400) < 86400 then zone = nil end
  if zone or not w then
    local number = window_at(period, zone and local_ms(zone, now) or now)
    local ends_at = window_start(period, number + 1)
    w = {number, zone and instant_ms(zone, ends_at) or ends_at}
    if not zone then windows[period] = w end
  end
  local last, spent = string.match(stored or '', '^(%d+) (%d+)$')
  local ahead = last and last - w[1] or -1
  if ahead < 0 or ahead > MOST_AHEAD then return w[1], w[2], 0 end
  if ahead == 0 then return w[1], w[2], tonumber(spent) end
  local ends_at = window_start(period, last + 1)
  return tonumber(last), zone and instant_ms(zone, ends_at) or ends_at, tonumber(spent)
end
