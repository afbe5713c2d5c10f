-- quota: fixed windows in UTC by Redis TIME (needs prelude). A day is a UTC day; a week begins on Monday; months and years are
-- those of the calendar. MONDAY_MS: from the Monday before 1970-01-01, a Thursday, until then.
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

-- window_at(period, ms) -> the number of the window that contains this time, and its end in ms. `period`: such as 1day or 3month;
-- the name of a quota of another unit than requests is its period with a mark, such as 1day:gpu.
local function window_at(period, ms)
  local count, unit = string.match(period, '^(%d+)(%a+)')
  local length = SECONDS[unit]
  if length then
    local length_ms, before_ms = length * count * 1000, unit == 'week' and MONDAY_MS or 0
    local number = math.floor((ms + before_ms) / length_ms)
    return number, (number + 1) * length_ms - before_ms
  end
  local months = unit == 'year' and 12 * count or tonumber(count)
  local number = math.floor(month_of(math.floor(ms / 86400000)) / months)
  return number, days_of((number + 1) * months) * 86400000
end

-- window(period): the current window.
local function window(period)
  local w = windows[period]
  if not w then
    w = {window_at(period, now)}
    windows[period] = w
  end
  return w[1], w[2]
end
